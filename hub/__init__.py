"""Makes the library a kernel of Hugging Face's hub; a tool of the checkout, which is not installed."""
