"""Store data in files: checksummed records, locks, artifacts, typed state."""
