"""What callers are told: the names that they used, and checks of single arguments."""
