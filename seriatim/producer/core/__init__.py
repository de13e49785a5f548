"""The producer's decisions, without I/O: when to close a batch, which identity a record gets, what to do when sending fails."""
