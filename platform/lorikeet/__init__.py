"""Platform around the engine: catalog, placement, routing, tenancy, HTTP, Ray Serve, CLI."""
