"""Commands that inspect a service, a file each: status, why, settings and doctor.

status and why call the admin API. settings and doctor inspect this machine and its environment.
"""
