"""The page at /ui: files for a browser, and the routes that serve them."""
