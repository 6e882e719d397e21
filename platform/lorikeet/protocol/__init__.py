"""What gateways, replicas and the controller say to each other. No Ray, no FastAPI, no torch."""
