{{- define "mvllm.name" -}}
{{- if contains "mvllm" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-mvllm" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "mvllm.selector" -}}
app.kubernetes.io/name: mvllm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mvllm.labels" -}}
{{ include "mvllm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Options of `mvllm serve`, as its --config file. */ -}}
{{- define "mvllm.options" -}}
{{- $own := dict "model" .Values.model "host" "0.0.0.0" "port" 8000 "shutdown-timeout" .Values.shutdownTimeoutSeconds }}
{{- if .Values.kvDiskCache.enabled }}
{{- $own = merge $own (dict "kv-disk-cache" "/kv" "kv-disk-cache-size" .Values.kvDiskCache.sizeGiB) }}
{{- end }}
{{- toYaml (merge $own .Values.options) }}
{{- end }}

{{- /* The volume of the KV disk cache: its files and what a file system needs itself. */ -}}
{{- define "mvllm.kvClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.kvDiskCache.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ add .Values.kvDiskCache.sizeGiB (div .Values.kvDiskCache.sizeGiB 10) 1 }}Gi
{{- end }}
