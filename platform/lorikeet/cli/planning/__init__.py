"""Commands that size and measure a service: capacity, bench."""
