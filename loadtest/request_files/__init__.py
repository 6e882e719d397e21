"""Own files and functions that one warm chat request enters, in all processes of the service."""
