"""The fields of KubeRay's resources (v1.7) that these manifests may use, and the operator's rules for them.

A cluster drops a key that it does not know, silently: these models refuse it, and values that the operator
refuses. ``test_kuberay`` also holds the manifests against the operator's own definitions.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Names = dict[str, str]
Template = dict[str, Any]
Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Auth(Strict):
    mode: Literal["disabled", "token"]
    secretName: str | None = None


class SecretKey(Strict):
    name: str
    key: str


class ValueFrom(Strict):
    secretKeyRef: SecretKey


class Credential(Strict):
    valueFrom: ValueFrom


class FaultTolerance(Strict):
    backend: Literal["redis"] = "redis"  # the other one is behind a feature gate
    redisAddress: str
    redisUsername: Credential | None = None
    redisPassword: Credential | None = None
    externalStorageNamespace: str | None = None


class Head(Strict):
    rayStartParams: Names
    template: Template
    serviceType: str | None = None
    headService: Template | None = None
    labels: Names | None = None
    resources: Names | None = None


class Workers(Strict):
    groupName: str
    replicas: Count
    minReplicas: Count
    maxReplicas: Count
    numOfHosts: Annotated[int, Field(ge=1)] = 1
    rayStartParams: Names
    template: Template
    labels: Names | None = None
    resources: Names | None = None

    @model_validator(mode="after")
    def _order(self) -> "Workers":
        if not self.minReplicas <= self.replicas <= self.maxReplicas:
            raise ValueError(f"{self.groupName}: min, replicas and max are not in order")
        return self


class Cluster(Strict):
    rayVersion: str
    authOptions: Auth | None = None
    gcsFaultToleranceOptions: FaultTolerance | None = None
    headGroupSpec: Head
    workerGroupSpecs: list[Workers] = []

    @model_validator(mode="after")
    def _rules(self) -> "Cluster":
        groups = [group.groupName for group in self.workerGroupSpecs]
        if len(set(groups)) != len(groups):
            raise ValueError(f"two worker groups have one name: {groups}")
        if self.gcsFaultToleranceOptions is not None:
            given = {e["name"] for e in self.headGroupSpec.template["spec"]["containers"][0].get("env", ())}
            managed = given & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"}
            if managed or "redis-password" in self.headGroupSpec.rayStartParams:
                raise ValueError("the operator sets Redis' address and password by itself")
        return self


class UpgradeStrategy(Strict):
    # The third kind needs the Gateway API and autoscaling.
    type: Literal["NewCluster", "None"]


class ServiceSpec(Strict):
    rayClusterConfig: Cluster
    serveConfigV2: str
    serveService: Template | None = None
    upgradeStrategy: UpgradeStrategy | None = None
    rayClusterDeletionDelaySeconds: Count | None = None
    excludeHeadPodFromServeSvc: bool | None = None
    suspend: bool | None = None

    @model_validator(mode="after")
    def _rules(self) -> "ServiceSpec":
        service = self.rayClusterConfig.headGroupSpec.headService or {}
        if "name" in service.get("metadata", {}):
            raise ValueError("the operator names the head's service")
        ports = self.rayClusterConfig.headGroupSpec.template["spec"]["containers"][0]["ports"]
        if "serve" not in {port["name"] for port in ports}:
            raise ValueError('without a port "serve" on the head there is no service')
        return self


class JobSpec(Strict):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode"] = "K8sJobMode"
    submitterPodTemplate: Template | None = None
    rayClusterSpec: Cluster
    backoffLimit: Count = 0
    activeDeadlineSeconds: Annotated[int, Field(gt=0)] | None = None
    shutdownAfterJobFinishes: bool = False
    ttlSecondsAfterFinished: Count = 0
    runtimeEnvYAML: str | None = None
    entrypointNumCpus: float | None = None

    @model_validator(mode="after")
    def _rules(self) -> "JobSpec":
        if self.ttlSecondsAfterFinished and not self.shutdownAfterJobFinishes:
            raise ValueError("a time to live needs shutdownAfterJobFinishes")
        return self


class Metadata(Strict):
    # The operator makes longer names out of it.
    name: Annotated[str, Field(max_length=41, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    namespace: str
    labels: Names = {}
    annotations: Names = {}


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: ServiceSpec


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec


KINDS = {"RayService": RayService, "RayJob": RayJob}
