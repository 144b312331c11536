{{- /* What pods of all tiers have in common. */ -}}

{{- /* The first part of a pod's spec: (dict "root" $ "tier" TIER "spec" VALUES "graceSeconds" N), "group" for workers. */ -}}
{{- define "pagewire.podBasics" -}}
{{- $fullname := include "pagewire.fullname" .root -}}
serviceAccountName: {{ $fullname }}-{{ .tier }}
automountServiceAccountToken: false
# Else the variables of a Service named pagewire would look like options of ours.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceSeconds }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- $class := ternary (printf "%s-%s" $fullname (eq .tier "worker" | ternary "worker" "control")) "" .root.Values.priorityClasses.create }}
{{- with .spec.priorityClassName | default $class }}
priorityClassName: {{ . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.spec $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pagewire.topologySpread" -}}
topologySpreadConstraints:
{{- with .spec.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pagewire.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pagewire.podMetadata" -}}
{{- /* No version among the labels: pods are replaced for what they run, and not for a new chart. */ -}}
metadata:
  labels:
    {{- include "pagewire.selector" . | nindent 4 }}
    {{- with .root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .spec.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .spec.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- /* (dict "readOnly" BOOL) */ -}}
{{- define "pagewire.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ .readOnly }}
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "pagewire.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- {name: HOME, value: /tmp}
- {name: USER, value: pagewire}
- {name: XDG_CACHE_HOME, value: /cache}
{{- range $name, $value := .env }}
- {name: {{ quote $name }}, value: {{ include "pagewire.plain" $value | quote }}}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Liveness asks for nothing but an answer, so neither a long step nor a lost peer ends a pod. */ -}}
{{- define "pagewire.liveness" -}}
livenessProbe:
  grpc: {port: 9463, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{- /* Files of identity, as mounts. (dict "root" $ "tier" TIER) */ -}}
{{- define "pagewire.identityMounts" -}}
{{- $values := .root.Values -}}
{{- $gateway := eq .tier "gateway" -}}
{{- if $values.peerToken.enabled }}
- {name: peers, mountPath: /etc/pagewire/peers, readOnly: true}
{{- end }}
{{- if and $values.apiKeys.secret (or $gateway $values.apiKeys.operators) }}
- {name: api-keys, mountPath: /etc/pagewire/api-keys, readOnly: true}
{{- end }}
{{- if $values.tls.enabled }}
- {name: tls, mountPath: /etc/pagewire/tls, readOnly: true}
{{- end }}
{{- if and $gateway $values.tls.public.enabled }}
- {name: public, mountPath: /etc/pagewire/public, readOnly: true}
{{- end }}
{{- end }}

{{- define "pagewire.identityVolumes" -}}
{{- $values := .root.Values -}}
{{- $gateway := eq .tier "gateway" -}}
{{- if $values.peerToken.enabled }}
- name: peers
  secret: {secretName: {{ include "pagewire.peerSecret" .root }}, defaultMode: 288}
{{- end }}
{{- if and $values.apiKeys.secret (or $gateway $values.apiKeys.operators) }}
- name: api-keys
  secret: {secretName: {{ $values.apiKeys.secret }}, defaultMode: 288}
{{- end }}
{{- if $values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "pagewire.tlsSecret" . }}, defaultMode: 288}
{{- end }}
{{- if and $gateway $values.tls.public.enabled }}
- name: public
  secret: {secretName: {{ include "pagewire.publicSecret" .root }}, defaultMode: 288}
{{- end }}
{{- end }}

{{- define "pagewire.peerSecret" -}}
{{ .Values.peerToken.secret | default (printf "%s-peers" (include "pagewire.fullname" .)) }}
{{- end }}

{{- define "pagewire.tlsSecret" -}}
{{- if eq .root.Values.tls.source "secrets" -}}
{{ index .root.Values.tls.secrets .tier }}
{{- else -}}
{{ include "pagewire.fullname" .root }}-{{ .tier }}-tls
{{- end -}}
{{- end }}

{{- define "pagewire.publicSecret" -}}
{{ .Values.tls.public.secret | default (include "pagewire.tlsSecret" (dict "root" . "tier" "gateway")) }}
{{- end }}
