"""What an engine counts, and what it says of itself: plain and picklable, needs no torch."""
