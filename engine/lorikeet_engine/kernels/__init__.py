"""The operators that a GPU spends its time in."""
