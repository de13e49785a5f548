"""Sources: what feeds a queue besides an application: a database log, a file, standard input."""
