{{- /* A group's values: worker's, and over them its own. (dict "root" $ "group" GROUP); to be read by fromYaml. */ -}}
{{- define "pagewire.groupValues" -}}
{{- $worker := mustMergeOverwrite (deepCopy (omit .root.Values.worker "groups")) .group -}}
{{- $_ := set $worker "model" (mustMergeOverwrite (deepCopy .root.Values.model) $worker.model) -}}
{{- toYaml $worker -}}
{{- end }}

{{- define "pagewire.gpuResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if eq .device "cuda" -}}
{{- range $part := list "requests" "limits" -}}
{{- $_ := set $resources $part (mustMerge (dict $.gpuResource (int $.tensorParallelSize)) (index $resources $part | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
