"""What is computed: requests, features of scores, masks and the running softmax."""
