"""Random chains: a run that is saved at random steps and goes on elsewhere, against the same run left alone.

`python -m tests.chains` runs them; `chain.py` says what is drawn, `trial.py` what is compared.
"""
