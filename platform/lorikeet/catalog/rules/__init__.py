"""What each operation changes and refuses, given the state: pure functions."""
