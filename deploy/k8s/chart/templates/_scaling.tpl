{{- /* Autoscalers and disruption budgets. */ -}}

{{- define "pagewire.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "pagewire.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  # A pod that is not ready serves no one: it may always go.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "pagewire.selector" . | nindent 6 }}
{{- end }}

{{- /* An HPA or a ScaledObject: (dict "root" $ "tier" TIER "kind" KIND "name" NAME "scaling" VALUES "metric" NAME), "group". */ -}}
{{- define "pagewire.autoscaler" -}}
{{- if eq .scaling.kind "hpa" -}}
{{ include "pagewire.hpa" . }}
{{- else if eq .scaling.kind "keda" -}}
{{ include "pagewire.scaledObject" . }}
{{- end -}}
{{- end }}

{{- define "pagewire.scaleDown" -}}
behavior:
  scaleDown:
    stabilizationWindowSeconds: 300
    policies:
      - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}

{{- define "pagewire.hpa" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels:
    {{- include "pagewire.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ .kind }}, name: {{ .name }}}
  minReplicas: {{ .scaling.minReplicas }}
  maxReplicas: {{ .scaling.maxReplicas }}
  {{- include "pagewire.scaleDown" . | nindent 2 }}
  metrics:
    {{- if .scaling.cpuPercent }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ .scaling.cpuPercent }}}
    {{- end }}
    {{- if .scaling.waitingPerReplica }}
    - type: External
      external:
        metric:
          name: {{ .metric }}
          selector:
            matchLabels: {pagewire_release: {{ include "pagewire.fullname" .root }}}
        target: {type: AverageValue, averageValue: {{ .scaling.waitingPerReplica | quote }}}
    {{- end }}
{{- end }}

{{- define "pagewire.scaledObject" -}}
{{- $labels := printf "namespace=%q,pagewire_release=%q" .root.Release.Namespace (include "pagewire.fullname" .root) -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels:
    {{- include "pagewire.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ .kind }}, name: {{ .name }}}
  minReplicaCount: {{ .scaling.minReplicas }}
  maxReplicaCount: {{ .scaling.maxReplicas }}
  pollingInterval: 15
  cooldownPeriod: 300
  advanced:
    horizontalPodAutoscalerConfig:
      {{- include "pagewire.scaleDown" . | nindent 6 }}
  {{- if not .scaling.cpuPercent }}
  # Without word from Prometheus as many as there are.
  fallback: {failureThreshold: 4, replicas: {{ .scaling.minReplicas }}, behavior: currentReplicasIfHigher}
  {{- end }}
  triggers:
    {{- if .scaling.cpuPercent }}
    - type: cpu
      metricType: Utilization
      metadata: {value: {{ .scaling.cpuPercent | quote }}}
    {{- end }}
    {{- if .scaling.waitingPerReplica }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .root.Values.monitoring.prometheus }}
        query: {{ printf "sum(%s{%s})" .metric $labels | quote }}
        threshold: {{ .scaling.waitingPerReplica | quote }}
    {{- end }}
{{- end }}
