"""OPTIMAS: optimize components by local rewards."""
