"""The packaged pipeline handed to Kubeflow Pipelines: one run now, waited for, or a recurring run every night."""
