"""Count of the own files and functions that one warm chat request enters."""
