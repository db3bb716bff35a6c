"""The pipeline: who feeds whom, and what each step needs. `make compile` writes it to neuroshard.yaml.

    load -> augment -> measure -> pretrain -> search -> deploy

Only `measure` touches the devices: one pod with `gpus` of them. `search` and `deploy` also read the tables; `deploy`
prices the live plan and the new one with the same cost model, and writes to the store.
"""

from kfp import dsl, kubernetes

from neuroshard.augment.component import augment, load
from neuroshard.component import CPU_IMAGE, GPU_IMAGE
from neuroshard.deploy.component import deploy
from neuroshard.measure.component import measure
from neuroshard.pretrain.component import pretrain
from neuroshard.search.component import search

# Keys of the secret that gives the steps their way into S3; without the secret, the pod's service account is the way.
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION")


@dsl.pipeline(name="neuroshard")
def neuroshard(
    tables: str = "mlperf-dlrm-dcnv2",
    devices: int = 4,
    memory: str = "80GiB",
    batch_size: int = 65536,
    store: str = "s3://mlpipeline/neuroshard",
    model: str = "mlperf-dlrm-dcnv2",
    single_writer: bool = False,
    backend: str = "cuda",
    compute_cases: int = 10000,
    comm_cases: int = 2000,
    measure_budget: str = "2h",
    algorithm: str = "neuroshard",
    seed: int = 0,
    gpus: str = "4",
    gpu_resource: str = "nvidia.com/gpu",
    measure_cpus: str = "16",
    measure_memory: str = "128Gi",
    measure_nodes: dict[str, str] = {},  # noqa: B006 # kfp reads the value of a default
    measure_tolerations: list[dict[str, str]] = [],  # noqa: B006
    measure_image: str = GPU_IMAGE,
    step_cpus: str = "2",
    step_memory: str = "8Gi",
    step_image: str = CPU_IMAGE,
    store_secret: str = "neuroshard-store",
) -> None:
    """Measure embedding tables on this cluster's devices, learn their costs, and put a sharding plan live.

    Parameters that are text and look like a number need quotes on kfp's command line: gpus='"8"'.

    Args:
        tables: What to shard: a preset's name, a file that the pod sees, or s3://bucket/tables.json.
        devices: Number of devices of the trainer.
        memory: What embeddings may take on a device: 80GiB, or one amount a device by commas.
        batch_size: Samples a step over all devices.
        store: Where plans live: s3://bucket/prefix.
        model: Whose plans these are; trainers ask the store for it by this name.
        single_writer: Nobody else deploys: accept a store that ignores conditional writes.
        backend: What is measured: cuda (FBGEMM and NCCL), cpu (FBGEMM and gloo) or synthetic (a formula).
        compute_cases: Table sets to measure on one device.
        comm_cases: Exchanges between devices to measure.
        measure_budget: Measuring stops after this long: 90s, 30m, 2h.
        algorithm: neuroshard, or a baseline: random, size, dim, lookup, size-lookup.
        seed: Of everything that is left to chance.
        gpus: GPUs of the measuring pod, as text; 0 for the cpu and synthetic backends.
        gpu_resource: The resource name of the GPUs.
        measure_cpus: CPUs of the measuring pod.
        measure_memory: Memory of the measuring pod.
        measure_nodes: Labels of the nodes to measure on, as JSON: {"node-pool": "h200"}.
        measure_tolerations: Taints to bear there, as JSON: [{"key": "nvidia.com/gpu", "operator": "Exists"}].
        measure_image: The image of the measuring pod; neuroshard-cpu will do for the cpu and synthetic backends.
        step_cpus: CPUs of every other pod.
        step_memory: Memory of every other pod.
        step_image: The image of every other pod.
        store_secret: A secret with AWS_ACCESS_KEY_ID and so on; it may be absent.
    """
    loaded = load(source=tables).set_display_name("load tables")
    drawn = augment(
        tables=loaded.outputs["tables"],
        devices=devices,
        memory=memory,
        compute_cases=compute_cases,
        comm_cases=comm_cases,
        seed=seed,
    )
    measured = measure(
        cases=drawn.outputs["cases"], backend=backend, batch_size=batch_size, budget=measure_budget, seed=seed
    )
    trained = pretrain(costs=measured.outputs["costs"], seed=seed)
    found = search(
        tables=loaded.outputs["tables"],
        cost_model=trained.outputs["cost_model"],
        devices=devices,
        memory=memory,
        batch_size=batch_size,
        algorithm=algorithm,
        seed=seed,
    )
    live = deploy(
        plan=found.outputs["plan"],
        tables=loaded.outputs["tables"],
        cost_model=trained.outputs["cost_model"],
        store=store,
        model=model,
        single_writer=single_writer,
    )

    for step in (loaded, drawn, trained, found, live):
        step.set_container_image(step_image)
        step.set_cpu_request(step_cpus).set_memory_request(step_memory).set_memory_limit(step_memory)
    measured.set_container_image(measure_image)
    measured.set_accelerator_type(gpu_resource).set_accelerator_limit(gpus)
    measured.set_cpu_request(measure_cpus).set_memory_request(measure_memory).set_memory_limit(measure_memory)
    kubernetes.add_node_selector_json(measured, measure_nodes)
    kubernetes.add_toleration_json(measured, measure_tolerations)
    kubernetes.empty_dir_mount(measured, "shm", "/dev/shm", medium="Memory")  # NCCL's and gloo's processes talk there
    for step in (loaded, live):
        kubernetes.use_secret_as_env(step, store_secret, {key: key for key in STORE_KEYS}, optional=True)

    # What these give changes with the world: the file behind `tables`, the hardware under the pod, the store.
    for step in (loaded, measured, live):
        step.set_caching_options(False)
