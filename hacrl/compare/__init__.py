"""Methods against each other: the same agents, start and tasks, an equal budget, several seeds (docs/compare.md).

plan.py        methods and seeds -> the configuration of each run, with the budget made equal
execute.py     runs in processes of their own, several at once
worker.py      what such a process does
statistics.py  intervals over seeds and tasks, and when a curve reaches a value; numbers in, numbers out
results.py     the records of the runs -> comparison.json
table.py       the same for people: terminal, Markdown, CSV
comparison.py  all of it in order
"""
