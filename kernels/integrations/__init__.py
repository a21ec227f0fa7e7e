"""Flash attention in the argument order of other projects; importing a module here needs neither them nor a GPU."""
