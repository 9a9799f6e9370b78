"""What a run leaves behind: its folder, record, budget, results, comparisons, reports.

No torch when imported. Imports core to observers.
"""
