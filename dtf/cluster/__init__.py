"""Schedulers and clouds: jobs that run this command line elsewhere, and what a process inside such a job knows."""
