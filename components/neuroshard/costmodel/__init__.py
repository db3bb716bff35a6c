"""First floor: what predicts costs. The protocol, features, nets and their bundle on disk, the analytic model, given costs."""
