"""The nightly run, above the stages: survey, augment, measure, pretrain, search, deploy."""
