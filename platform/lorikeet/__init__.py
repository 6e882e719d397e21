"""The platform around the engine: catalog, placement, routing, tenancy, HTTP API, Ray Serve, CLI."""
