"""The real service under a simulated scenario's very requests, its engine steps slowed down."""
