"""The nightly run, above the stages: survey, draw, learn, search, release."""
