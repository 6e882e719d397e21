{{- define "lorikeet.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What every container reads: the overlay's settings, then values, then .settings. */ -}}
{{- define "lorikeet.settings" -}}
{{- $values := dict
  "AWS_REGION" .Values.s3.region
  "BASE_MODELS_URL" .Values.baseModels.url
  "LORIKEET_BASE_MODELS" .Values.baseModels.served
  "LORIKEET_CATALOG" .Values.catalog.url
  "LORIKEET_GATEWAYS" (toString .Values.gateways.replicas)
  "LORIKEET_REPLICAS" (toString .Values.engines.replicas)
-}}
{{- with .Values.s3.endpoint }}{{ $_ := set $values "AWS_ENDPOINT_URL" . }}{{ end -}}
{{- with .Values.autoscaling }}{{ if .enabled }}{{ $_ := set $values "LORIKEET_MAX_REPLICAS" (toString .maxReplicas) }}{{ end }}{{ end -}}
{{- merge (dict) .Values.settings $values (.Files.Get "files/settings.json" | fromJson) | toJson -}}
{{- end -}}

{{- /* A changed setting changes the name, and so the RayService: KubeRay brings up a new cluster. */ -}}
{{- define "lorikeet.settingsName" -}}
settings-{{ include "lorikeet.settings" . | sha256sum | trunc 10 }}
{{- end -}}
