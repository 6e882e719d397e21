"""What tenants used: counted by replicas, kept in the catalog's store, read by gateways."""
