"""How jobs reach workers. One file per engine; the tables of jobs decide in all of them."""
