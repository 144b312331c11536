{{- /* Command lines of the services, as lists of words. */ -}}

{{- /* --NAME=VALUE of a map: a list repeats the option, true is a switch. Whole numbers stay without exponent. */ -}}
{{- define "pagewire.options" -}}
{{- range $name, $value := . -}}
{{- if kindIs "bool" $value -}}
{{- if $value }}
- --{{ $name }}
{{- end -}}
{{- else -}}
{{- range (kindIs "slice" $value | ternary $value (list $value)) }}
- {{ printf "--%s=%s" $name (include "pagewire.plain" .) | quote }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "pagewire.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end }}

{{- /* What every service is told: (dict "root" $ "tier" TIER). */ -}}
{{- define "pagewire.commonOptions" -}}
{{- $values := .root.Values -}}
{{- $gateway := eq .tier "gateway" -}}
- {{ printf "--host=%s" $values.listenAddress | quote }}
- --health-port=9463
- --metrics-port=9464
{{- if $values.peerToken.enabled }}
- --peer-token-file=/etc/pagewire/peers/token
{{- else if not (or $gateway (and $values.tls.enabled $values.tls.mutual)) }}
- --insecure
{{- end }}
{{- if and $values.apiKeys.secret (or $gateway $values.apiKeys.operators) }}
- {{ printf "--api-keys=/etc/pagewire/api-keys/%s" $values.apiKeys.key | quote }}
{{- end }}
{{- include "pagewire.tlsOptions" . }}
{{- end }}

{{- define "pagewire.tlsOptions" -}}
{{- $tls := .root.Values.tls -}}
{{- if eq .tier "gateway" -}}
{{- if $tls.public.enabled }}
- --tls-cert=/etc/pagewire/public/tls.crt
- --tls-key=/etc/pagewire/public/tls.key
{{- if $tls.public.clientCertificates }}
- --tls-client-ca=/etc/pagewire/public/ca.crt
{{- end }}
{{- end }}
{{- else if $tls.enabled }}
- --tls-cert=/etc/pagewire/tls/tls.crt
- --tls-key=/etc/pagewire/tls/tls.key
{{- if $tls.mutual }}
- --tls-client-ca=/etc/pagewire/tls/ca.crt
{{- end }}
{{- end }}
{{- if and $tls.enabled (ne .tier "worker") }}
- --tls-ca=/etc/pagewire/tls/ca.crt
{{- if $tls.mutual }}
- --tls-client-cert=/etc/pagewire/tls/tls.crt
- --tls-client-key=/etc/pagewire/tls/tls.key
{{- end }}
{{- end }}
{{- end }}
