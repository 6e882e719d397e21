"""Responses that are kept in the catalog's store for a while, by tenant, where that is on."""
