{{- /* The alerts, by name: what is true for how long, how bad it is, and what it means. LABELS stands for the labels of
       this release. docs/deploy.md says what to do about each. */ -}}
{{- define "pagewire.alerts" -}}
PagewireNoScheduler:
  expr: absent(up{pagewire_tier="scheduler",LABELS} == 1)
  for: 2m
  severity: critical
  summary: No scheduler can be scraped; gateways cannot serve.
PagewireNoGateway:
  expr: absent(pagewire_gateway_ready{LABELS} == 1)
  for: 2m
  severity: critical
  summary: No gateway is ready; requests are refused.
PagewireNoWorker:
  expr: sum(pagewire_scheduler_worker_ready{LABELS}) == 0 or absent(pagewire_scheduler_worker_ready{LABELS})
  for: 2m
  severity: critical
  summary: No worker is attached; nothing is computed.
PagewireWorkerAway:
  expr: sum by (worker) (pagewire_scheduler_worker_ready{LABELS}) == 0
  for: 15m
  severity: warning
  summary: "Worker {{`{{ $labels.worker }}`}} is known and not attached."
PagewireWorkerLosses:
  expr: sum by (worker) (increase(pagewire_scheduler_worker_losses_total{LABELS}[30m])) > 2
  for: 0m
  severity: warning
  summary: "Worker {{`{{ $labels.worker }}`}} was lost {{`{{ $value | printf \"%.0f\" }}`}} times in half an hour."
PagewireSchedulerLosses:
  expr: sum(increase(pagewire_gateway_scheduler_losses_total{LABELS}[30m])) > 2 * count(pagewire_gateway_ready{LABELS})
  for: 0m
  severity: warning
  summary: Gateways lose the scheduler again and again.
PagewireErrors:
  expr: |-
    sum(rate(pagewire_gateway_requests_total{outcome=~"request_poisonous|internal_error|unavailable|deadline_exceeded",LABELS}[5m]))
      / sum(rate(pagewire_gateway_requests_total{LABELS}[5m])) > 0.01
  for: 5m
  severity: warning
  summary: "{{`{{ $value | humanizePercentage }}`}} of requests end with an error that is not the client's."
PagewireRefusals:
  expr: sum(rate(pagewire_scheduler_refusals_total{code="RESOURCE_EXHAUSTED",LABELS}[5m])) > 0
  for: 5m
  severity: warning
  summary: The queue is full; requests are refused with 429.
PagewireQueue:
  expr: sum(pagewire_scheduler_requests_waiting{LABELS}) > sum(pagewire_scheduler_slots{LABELS})
  for: 10m
  severity: warning
  summary: More requests wait than can run at once.
PagewireFirstToken:
  expr: histogram_quantile(0.95, sum by (le) (rate(pagewire_gateway_time_to_first_token_seconds_bucket{LABELS}[5m]))) > FIRST_TOKEN
  for: 10m
  severity: warning
  summary: "One request of twenty waits {{`{{ $value | humanizeDuration }}`}} or longer for its first token."
PagewireTokenGap:
  expr: histogram_quantile(0.95, sum by (le) (rate(pagewire_gateway_inter_token_latency_seconds_bucket{LABELS}[5m]))) > TOKEN_GAP
  for: 10m
  severity: warning
  summary: "One gap between tokens of twenty takes {{`{{ $value | humanizeDuration }}`}} or longer."
PagewireKvFull:
  expr: max by (worker) (pagewire_scheduler_kv_usage_ratio{LABELS}) > 0.95
  for: 10m
  severity: warning
  summary: "The KV cache of worker {{`{{ $labels.worker }}`}} is full; requests are preempted or wait."
PagewirePreemptions:
  expr: |-
    sum(rate(pagewire_scheduler_preemptions_total{LABELS}[10m]))
      > 0.1 * sum(rate(pagewire_scheduler_accepted_requests_total{LABELS}[10m]))
  for: 10m
  severity: warning
  summary: More than one request of ten loses its slot and is computed again.
PagewireFailedSteps:
  expr: sum by (pod) (increase(pagewire_worker_failed_steps_total{LABELS}[15m])) > 0
  for: 0m
  severity: warning
  summary: "Worker {{`{{ $labels.pod }}`}} failed at a step."
PagewireWorkerIdle:
  expr: |-
    sum(rate(pagewire_worker_device_idle_seconds_total{kind="decode",LABELS}[10m]))
      / (sum(rate(pagewire_worker_device_busy_seconds_total{kind="decode",LABELS}[10m]))
         + sum(rate(pagewire_worker_device_idle_seconds_total{kind="decode",LABELS}[10m]))) > 0.3
    and sum(pagewire_scheduler_requests_waiting{LABELS}) > 0
  for: 15m
  severity: info
  summary: "Requests wait, and devices stand idle {{`{{ $value | humanizePercentage }}`}} of the time between decode steps."
PagewireOpenFiles:
  expr: max by (pod) (process_open_fds{pagewire_tier!="",LABELS} / process_max_fds{pagewire_tier!="",LABELS}) > 0.8
  for: 5m
  severity: warning
  summary: "Pod {{`{{ $labels.pod }}`}} has nearly as many files and connections open as it may."
{{- end }}
