"""The append-only log: its entries, and how they turn one state into the next."""
