"""What is asked of the stages: the options of a search, and what the steps of a nightly run hand on.

options.py      how an option is declared, once for the command line, Python and models.yaml; and all those of a search
search.py       SearchOrder: one search, its options checked
values.py       arguments of any type, taken or refused in a line
sizes.py        SizeOrder: kinds of hardware, numbers of devices, prices
deploy.py       what the gate is given
nightly.py      models.yaml, and the messages between the steps of a nightly run
parameters.py   what each parameter of the nightly pipeline may be
"""
