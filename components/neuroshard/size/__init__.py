"""How many devices, of which kind, with how much memory: a plan and a bound for every size, and the sizes that no other beats.

cells.py     an order -> the cells to search: a kind, so many devices, so much memory; and a row, what is known of a cell
sweep.py     cells -> rows, in the order of what they tell, by one process or several
frontier.py  the rows that no other beats, and what a GiB of HBM is worth
text.py      rows as lines and as JSON
page.py      rows as one HTML page
run.py       the verb
"""
