{{- /* Names, labels and addresses. Names leave room for what StatefulSets append: 63 characters. */ -}}

{{- define "pagewire.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 28 | trimSuffix "-" }}
{{- end }}

{{- define "pagewire.fullname" -}}
{{- $name := include "pagewire.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 28 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 28 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 28 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- /* What selects pods and never changes: (dict "root" $ "tier" TIER), and "group" for a worker group's. */ -}}
{{- define "pagewire.selector" -}}
app.kubernetes.io/name: {{ include "pagewire.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .tier }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .group }}
pagewire-group: {{ . }}
{{- end }}
{{- end }}

{{- define "pagewire.labels" -}}
{{ include "pagewire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Full DNS name of a Service: (dict "root" $ "service" NAME). */ -}}
{{- define "pagewire.host" -}}
{{ printf "%s.%s.svc.%s" .service .root.Release.Namespace .root.Values.clusterDomain }}
{{- end }}

{{- define "pagewire.schedulerHost" -}}
{{ include "pagewire.host" (dict "root" . "service" (printf "%s-scheduler" (include "pagewire.fullname" .))) }}
{{- end }}

{{- /* An image below the registry: (dict "root" $ "image" NAME); a NAME with a tag or digest has no other. */ -}}
{{- define "pagewire.image" -}}
{{- $image := .image -}}
{{- if not (regexMatch "[:@]" (base $image)) -}}
{{- $image = printf "%s:%s" $image (.root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $image }}
{{- end }}
