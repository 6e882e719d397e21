"""`lorikeet serve` and `lorikeet stop`: run the service on this machine with one command.

command.py          the two commands
options.py          an option for each setting
environment.py      variables that the service's processes read, and ports
base_models.py      names base models, and downloads them from the Hugging Face Hub
adapters.py         names, checks and registers adapters
keys.py             makes the catalog, and its first keys
run.py              checks, starts, waits and stops; demo/ uses it too
progress.py         shows the progress of a start
greeting.py         text that is printed once the service is ready
running.py          lock of a folder's running service
service_process.py  process of the service, which ends with all it started
"""
