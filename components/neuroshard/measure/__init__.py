"""Room 2: cases -> costs, on the synthetic formula, this machine's CPU, or its GPUs.

run                     cases -> costs, and how it went; schedule orders them, budget says how often each is repeated
backends                what measures: synthetic (by formula.py), or real_devices, cpu and cuda
    machine             what differs between a CPU and GPUs, and what costs were measured on, as a value
    rowcap              what a measurement may take of memory, and tables with fewer rows that fit
timing/, workers/       how a case is timed, and the processes that do it
shares/                 a draw of cases, measured by many pods
evaluate                a plan run for real, and its result
verify                  labels, measured again
network                 rates and latencies between hosts
"""
