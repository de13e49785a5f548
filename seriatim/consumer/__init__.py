"""The reading side: elected readers that are handed a queue in strict order."""
