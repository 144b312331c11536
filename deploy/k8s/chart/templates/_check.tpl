{{- /* What a schema cannot say: values that do not fit together are refused by name. */ -}}
{{- define "pagewire.check" -}}
{{- $values := .Values -}}
{{- $gateway := mustMergeOverwrite (deepCopy $values.model) $values.gateway.model -}}
{{- include "pagewire.checkModel" (dict "name" "gateway.model" "model" $gateway) -}}
{{- if and (eq $gateway.source "volume") (not $gateway.volume.shared) -}}
{{- fail "model.volume.shared: gateways would mount the workers' volume; say true if pods of several nodes can, or give gateways a source of their own in gateway.model" -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $group := $values.worker.groups -}}
{{- if hasKey $seen $group.name -}}
{{- fail (printf "worker.groups: two groups are named %s" $group.name) -}}
{{- end -}}
{{- $_ := set $seen $group.name true -}}
{{- $spec := include "pagewire.groupValues" (dict "root" $ "group" $group) | fromYaml -}}
{{- include "pagewire.checkModel" (dict "name" (printf "worker.groups (%s) model" $group.name) "model" $spec.model) -}}
{{- include "pagewire.checkScaling" (dict "name" (printf "worker.groups (%s) autoscaling" $group.name) "scaling" $spec.autoscaling) -}}
{{- end -}}
{{- include "pagewire.checkScaling" (dict "name" "gateway.autoscaling" "scaling" $values.gateway.autoscaling) -}}
{{- include "pagewire.checkIdentity" $values -}}
{{- end }}

{{- define "pagewire.checkModel" -}}
{{- $model := .model -}}
{{- $needed := dict "hub" $model.hub.name "s3" $model.s3.path "volume" $model.volume.source "embedded" "nothing" -}}
{{- if not (get $needed $model.source) -}}
{{- $key := get (dict "hub" "hub.name" "s3" "s3.path" "volume" "volume.source") $model.source -}}
{{- fail (printf "%s.%s: empty, and source is %s" .name $key $model.source) -}}
{{- end -}}
{{- if and (eq $model.storage.kind "claim") (not $model.storage.claim) -}}
{{- fail (printf "%s.storage.claim: empty, and storage.kind is claim" .name) -}}
{{- end -}}
{{- end }}

{{- define "pagewire.checkScaling" -}}
{{- $scaling := .scaling -}}
{{- if ne $scaling.kind "none" -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: %d is more than maxReplicas, %d" .name (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- if not (or $scaling.cpuPercent $scaling.waitingPerReplica) -}}
{{- fail (printf "%s: neither cpuPercent nor waitingPerReplica says what to scale by" .name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "pagewire.checkIdentity" -}}
{{- $tls := .tls -}}
{{- if and $tls.mutual (not $tls.enabled) -}}
{{- fail "tls.mutual: needs tls.enabled" -}}
{{- end -}}
{{- if and $tls.enabled (eq $tls.source "secrets") -}}
{{- range $tier := list "gateway" "scheduler" "worker" -}}
{{- if not (get $tls.secrets $tier) -}}
{{- fail (printf "tls.secrets.%s: empty, and tls.source is secrets" $tier) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $tls.public.enabled (not $tls.enabled) (not $tls.public.secret) -}}
{{- fail "tls.public.secret: empty, and without tls.enabled gateways have no certificate of their own" -}}
{{- end -}}
{{- if not (or .peerToken.enabled (and $tls.enabled $tls.mutual) .networkPolicy.enabled) -}}
{{- fail "peerToken.enabled: false, and neither tls.mutual nor networkPolicy.enabled keeps strangers from the workers" -}}
{{- end -}}
{{- if and .apiKeys.operators (not (or .peerToken.enabled (and $tls.enabled $tls.mutual))) -}}
{{- fail "apiKeys.operators: scheduler and workers need peerToken.enabled or tls.mutual, for their peers" -}}
{{- end -}}
{{- if and .apiKeys.secret .test.enabled (not .test.apiKeySecret) -}}
{{- fail "test.apiKeySecret: empty, and the gateway has API keys; give a key, or set test.enabled=false" -}}
{{- end -}}
{{- end }}
