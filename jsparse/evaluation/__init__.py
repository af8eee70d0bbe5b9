"""What a policy costs in quality: closeness to dense attention, tasks of long context, attention on
real queries.
"""
