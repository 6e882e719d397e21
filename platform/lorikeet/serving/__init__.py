"""Where Ray Serve and the engine meet."""
