"""The pipeline: who feeds whom, and what each step needs. `make compile` writes it to neuroshard.yaml.

    survey -> night: plan, for the first model that need not wait
                     for each other one: plan
                     for each kind of hardware to measure: augment -> kind: for each share: measure -> pretrain
                                                                            -> for each model that waited: plan

`survey` finds the kinds of hardware whose live cost models do not cover what the models need. Only `measure` uses devices, on
the nodes that `augment` names. Steps meet in the store, where they find a run under RUN, its name, so that a run continues where
the one before it failed. A failure of one kind of hardware, or of one model, is recorded there, and the others go on.

What a pod costs decides the shape: a step is two pods, and each loop, each item of one and each inner pipeline has another. So
one model is planned outside of loops, by a name that the store knows.

KFP 2.17 finds an output by the names of all steps of its pipeline and of those inside, and fails for good where a name is there
twice, as after a driver that Argo made again. So outputs are looked up in two places alone, right after their step and before
anything else begins: `night` takes those of `survey`, and `kind` those of `augment`, as parameters, which cost no look-up.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, List  # noqa: UP035 # as in the components

from kfp import dsl, kubernetes

from neuroshard.component import CPU_IMAGE, GPU_IMAGE
from neuroshard.kube import POD_LABELS, USER
from neuroshard.nightly.component import augment, measure, plan, pretrain, survey

RUN = dsl.PIPELINE_JOB_ID_PLACEHOLDER
# kfp mixes up the Kubernetes fields of steps of one name where one is in a pipeline and the other in a pipeline inside of it
plan_later = deepcopy(plan)
plan_later.component_spec.name = "plan-later"
FIRST = ""  # the model that `survey` recorded as the first to plan

# Keys of the secret with the credentials for S3. Without the secret, the pod's service account is used.
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION")
# The secret of Kubeflow's own object store, where the default store is
KUBEFLOW_SECRET, KUBEFLOW_KEYS = (
    "mlpipeline-minio-artifact",
    {"accesskey": "KUBEFLOW_ACCESS_KEY", "secretkey": "KUBEFLOW_SECRET_KEY"},
)


def equip(step: dsl.PipelineTask, image: str, cpus: str, memory: str, secret: str = "") -> None:
    """Give a step its image, resources, labels and security context; and the secret, if the step uses the store."""
    step.set_container_image(image)
    step.set_cpu_request(cpus).set_memory_request(memory).set_memory_limit(memory)
    step.register_pipeline_channels(
        [one for one in (image, cpus, memory, secret) if one]
    )  # inside a loop kfp would forget these
    # Pod Security `restricted` requires these; KFP sets the rest itself
    kubernetes.set_security_context(step, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    for key, value in POD_LABELS.items():
        kubernetes.add_pod_label(step, key, value)
    if secret:
        kubernetes.use_secret_as_env(step, secret, {key: key for key in STORE_KEYS}, optional=True)
        kubernetes.use_secret_as_env(step, KUBEFLOW_SECRET, KUBEFLOW_KEYS, optional=True)
    step.set_caching_options(False)  # every step reads what changes: the fleet, the store, a model's tables


def plan_model(step_of: dict[str, Any], pod: Iterable[Any], model: Any, *, at_once: bool) -> dsl.PipelineTask:
    """The step that gives a model its plan."""
    planned = (plan if at_once else plan_later)(**step_of, model=model, at_once=at_once)
    equip(planned, *pod)
    return planned


@dsl.pipeline(name="kind")
def measure_kind(
    shares: List[str],  # noqa: UP006
    later: List[str],  # noqa: UP006
    kind: str,
    store: str,
    single_writer: bool,
    image: str,
    cpus: str,
    memory: str,
    gpus: str,
    resource: str,
    nodes: dict,  # type: ignore[type-arg]
    tolerations: list,  # type: ignore[type-arg]
    step_image: str,
    step_cpus: str,
    step_memory: str,
    store_secret: str,
) -> None:
    """Each share of a kind of hardware in a pod of its own, on a node of the kind; then its cost model, and the models that
    waited for it."""
    step_of = {"run": RUN, "store": store, "single_writer": single_writer}
    pod = (step_image, step_cpus, step_memory, store_secret)
    with dsl.ParallelFor(shares) as share:
        measured = measure(**step_of, kind=kind, share=share)
        equip(measured, image, cpus, memory, store_secret)
        measured.register_pipeline_channels([gpus, resource])
        measured.set_accelerator_type(resource).set_accelerator_limit(gpus)
        kubernetes.add_node_selector_json(measured, nodes)
        kubernetes.add_toleration_json(measured, tolerations)
        kubernetes.empty_dir_mount(measured, "shm", "/dev/shm", medium="Memory")  # for the processes of NCCL and gloo
    learnt = pretrain(**step_of, kind=kind).after(measured)
    equip(learnt, *pod)
    with dsl.ParallelFor(later) as model:
        plan_model(step_of, pod, model, at_once=False).after(learnt)


@dsl.pipeline(name="night")
def night(
    kinds: List[str],  # noqa: UP006
    at_once: List[str],  # noqa: UP006
    store: str,
    single_writer: bool,
    step_image: str,
    step_cpus: str,
    step_memory: str,
    store_secret: str,
) -> None:
    """The first of the models that need not wait, the others, and each kind of hardware to measure, beside each other."""
    step_of = {"run": RUN, "store": store, "single_writer": single_writer}
    pod = {"step_image": step_image, "step_cpus": step_cpus, "step_memory": step_memory, "store_secret": store_secret}
    plan_model(step_of, pod.values(), FIRST, at_once=True)
    with dsl.ParallelFor(at_once) as model:
        plan_model(step_of, pod.values(), model, at_once=True)
    with dsl.ParallelFor(kinds) as kind:
        drawn = augment(**step_of, kind=kind)
        equip(drawn, *pod.values())
        measure_kind(**drawn.outputs, **pod, kind=kind, store=store, single_writer=single_writer)


@dsl.pipeline(name="neuroshard")
def neuroshard(
    models: str = '[{"name": "mlperf-dlrm-dcnv2", "tables": "mlperf-dlrm-dcnv2", "devices": 4, "memory": "80GiB"}]',
    store: str = "s3://mlpipeline/neuroshard",
    backend: str = "cuda",
    batch_size: int = 65536,
    compute_cases: int = 10000,
    collective_cases: int = 2000,
    measure_budget: str = "2h",
    max_age: str = "",
    max_error: float = 0.2,
    min_gain: float = -1.0,
    memory_margin: float = 0.0,
    algorithm: str = "local-search",
    seed: int = 0,
    single_writer: bool = False,
    nodes: str = "",
    node_selector: str = "{}",
    tolerations: str = '[{"key": "nvidia.com/gpu", "operator": "Exists"}]',
    pods: int = 4,
    training_runtime: str = "",
    measure_cpus: str = "16",
    measure_memory: str = "128Gi",
    measure_image: str = GPU_IMAGE,
    step_cpus: str = "2",
    step_memory: str = "8Gi",
    step_image: str = CPU_IMAGE,
    store_secret: str = "neuroshard-store",
) -> None:
    """Measure the kinds of hardware that no live cost model covers, learn their costs, and put every model's plan live.

    Args:
        models: The models that need a plan, as JSON: [{"name", "tables", "devices", "memory", "hardware"}, …]. Tables are a
            preset's name, a file that the pod sees, or s3://bucket/tables.json. Memory is 80GiB, or one amount for each device,
            with commas. Hardware (H200) is guessed where the fleet has several kinds and a model names none.
        store: Where plans and cost models live: s3://bucket/prefix. The bucket mlpipeline is Kubeflow's own.
        backend: What to measure with: cuda (FBGEMM and NCCL), cpu (FBGEMM and gloo) or synthetic (a formula).
        batch_size: Samples a step over all devices.
        compute_cases: Table sets to measure on one device, for each kind of hardware.
        collective_cases: All-to-alls between devices to measure.
        measure_budget: A measuring pod stops after this long: 90s, 30m, 2h.
        max_age: A cost model older than this is measured again: 2160h. Empty for never.
        max_error: Largest error of a cost model on unseen tables with which it, or a plan, goes live: 0.2 is 20 %; 0 for any.
        min_gain: Share by which a plan must be better than the live one; below 0 for what predictions are off by, at least
            30 % for a datasheet or a fallback.
        memory_margin: Share of a device's memory that a plan leaves free.
        algorithm: local-search, neuroshard-2023, or a baseline: random, size, dim, lookup, size-lookup.
        seed: The seed of all random choices.
        single_writer: Accept a store that ignores conditional writes; then nobody else may deploy there.
        nodes: A file with what `kubectl get nodes -o json` wrote, in place of asking the cluster.
        node_selector: Labels of the nodes to measure on, as JSON: {"node-pool": "train"}.
        tolerations: Taints of those nodes to tolerate, as JSON. Nodes with other taints are not used.
        pods: The most pods that measure one kind of hardware at once, each on a node of its own.
        training_runtime: Measure each kind by one TrainJob over its nodes, with the TrainingRuntime NAME-FINGERPRINT of the
            kind. Empty for pods of the pipeline's own.
        measure_cpus: CPUs of a measuring pod. Its GPUs are all that a node of its kind has.
        measure_memory: Memory of a measuring pod.
        measure_image: The image of a measuring pod; neuroshard-cpu suffices for the cpu and synthetic backends.
        step_cpus: CPUs of every other pod.
        step_memory: Memory of every other pod.
        step_image: The image of every other pod.
        store_secret: A secret with AWS_ACCESS_KEY_ID and so on; it may be absent.
    """
    seen = survey(run=RUN, **locals())
    pod = {"step_image": step_image, "step_cpus": step_cpus, "step_memory": step_memory, "store_secret": store_secret}
    equip(seen, *pod.values())
    night(**seen.outputs, **pod, store=store, single_writer=single_writer)
