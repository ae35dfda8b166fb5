"""OPTIMAS: optimize components by learned local rewards."""
