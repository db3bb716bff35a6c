"""Who measures: the processes of one machine, the shares of several machines, and train jobs on a cluster."""
