"""How many devices, of which kind, with how much memory: a plan and a bound for every size, and the sizes that no other beats.

rows.py   an order -> the cells to search, and a row, what is known of a cell; the rows that no other beats
run.py    the verb: cells -> rows, in the order of what they tell, by one process or several
shown.py  rows as lines, and as one HTML page
"""
