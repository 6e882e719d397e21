"""Commands that look at a service, a file each: status, why, settings and doctor.

status and why ask the admin API; settings and doctor look at this machine and its environment.
"""
