"""What a planted defect may change in the world; the names say what is right."""

checks_incarnation = True
another_disk_answers = False
waits_for_equal_copies = True
slave_confirms_what_it_has = True
seals_are_flushed = True
